#include "../dflash-trace.h"
#include "check.h"

#include <fstream>
#include <iterator>

using namespace dflashcpp;

static std::string content(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return { std::istreambuf_iterator<char>(file), {} };
}

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    const std::string path = std::string(argv[1]) + "/trace.jsonl";
    {
        trace_writer writer(path.c_str());
        CHECK(writer.on());
        const float rows[] = { 1, 2, 3, 4 };
        writer.inject(0, { 7, 8 }, rows, 2);
        writer.inject(1, { 9 }, rows + 2, 2);
        const float ids[]    = { 5, 6 };
        const float scores[] = { 0.5f, -1 };
        writer.candidates(ids, scores, 2);
        writer.draft(1, 10, 3, { 5, 6 });
        writer.draft(0, 11, 4, {});
    }
    CHECK(content(path) ==
            "{\"event\":\"inject\",\"seq\":0,\"width\":2,\"offset\":0,\"pos\":[7,8]}\n"
            "{\"event\":\"inject\",\"seq\":1,\"width\":2,\"offset\":4,\"pos\":[9]}\n"
            "{\"event\":\"draft\",\"seq\":1,\"pos0\":10,\"anchor\":3,\"drafted\":[5,6],\"lattice\":[{\"ids\":[5,6],\"scores\":[0.5,-1]}]}\n"
            "{\"event\":\"draft\",\"seq\":0,\"pos0\":11,\"anchor\":4,\"drafted\":[],\"lattice\":[]}\n");
    CHECK(content(path + ".f32").size() == 6 * sizeof(float));

    trace_writer more(path.c_str()); // a second run appends, offsets go on
    const float row[] = { 1, 2 };
    more.inject(0, { 1 }, row, 2);
    CHECK(content(path).find("\"offset\":6") != std::string::npos);

    trace_writer off(nullptr);
    CHECK(!off.on());
    off.draft(0, 0, 0, { 1 });

    trace_writer nowhere("/nonexistent/folder/trace");
    CHECK(!nowhere.on());
    return failures();
}
