#include "../switches.h"
#include "check.h"

using namespace dflashcpp;

int main() {
    CHECK(lists("top-k", "top-k"));
    CHECK(lists("arena,top-k", "top-k"));
    CHECK(lists(" arena , top-k ", "top-k"));
    CHECK(lists(" arena , top-k ", "arena"));
    CHECK(!lists("arena,top-k-more", "top-k"));
    CHECK(!lists("top", "top-k"));
    CHECK(!lists("", "top-k"));
    CHECK(!lists(",, ,", "top-k"));
    CHECK(lists(",,top-k,", "top-k"));
    CHECK(!lists("arena", ""));

    setenv("DFLASHCPP_OFF", "one,two", 1);
    CHECK(is_off("one"));
    CHECK(is_off("two"));
    CHECK(!is_off("three"));
    unsetenv("DFLASHCPP_OFF");
    CHECK(!is_off("one"));
    return failures();
}
