#include "../device-limits.h"
#include "check.h"

using namespace dflashcpp;

int main() {
    CHECK(parse_limits(nullptr).empty());
    CHECK(parse_limits("").empty());
    const auto two = parse_limits("Host=300,CUDA0=16000");
    CHECK(two.size() == 2 && two.at("Host") == 300 && two.at("CUDA0") == 16000);
    CHECK(parse_limits("Host=0").at("Host") == 0);
    for (const char * bad : { "Host", "=5", "Host=", "Host=x", "Host=5x", "Host=-1", ",,", "," }) {
        CHECK(parse_limits(bad).empty());
    }
    CHECK(parse_limits("nonsense,Host=7,").at("Host") == 7);
    return failures();
}
