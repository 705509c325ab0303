#include "../draft-stamp.h"
#include "check.h"

using namespace dflashcpp;

static std::string folder;

// a file as llama.cpp writes it: magic, version, the list, a state
static void write_file(const std::string & path, const std::vector<int32_t> & all, const std::string & state) {
    const uint32_t head[3] = { 0x67677371, 2, uint32_t(all.size()) };
    std::ofstream  file(path, std::ios::binary);
    file.write(reinterpret_cast<const char *>(head), sizeof(head));
    file.write(reinterpret_cast<const char *>(all.data()), std::streamsize(all.size() * sizeof(int32_t)));
    file << state;
}

static bool exists(const std::string & path) { return std::ifstream(path).good(); }

static std::string text_of(const std::string & path) {
    std::ifstream file(path);
    std::string   text;
    file >> text;
    return text;
}

static void a_stamp_tells_drafters_apart() {
    draft_stamp one;
    draft_stamp other;
    draft_stamp split;
    one.add("ab");
    one.add("c");
    other.add("ab");
    other.add("d");
    split.add("a");
    split.add("bc");
    CHECK(one.on({ 7 }) == one.on({ 7 }));
    CHECK(one.on({ 7 }) != other.on({ 7 }));
    CHECK(one.on({ 7 }) != split.on({ 7 }));
    CHECK(one.on({ 7, 8 }).size() == 6);
    CHECK(one.on({ 7, 8 })[4] == 7 && one.on({ 7, 8 })[5] == 8);
}

static void only_a_whole_file_of_these_tokens_counts() {
    const std::string path = draft_file_name(folder + "/slot");
    const std::string state(50, 'x');
    draft_stamp stamp;
    stamp.add("a drafter");
    CHECK(path == folder + "/slot.draft");
    std::remove(path.c_str());
    CHECK(!is_whole(path, stamp.on({ 1, 2, 3 })));
    CHECK(!seal(path, 50));
    write_file(path, stamp.on({ 1, 2, 3 }), state);
    CHECK(!is_whole(path, stamp.on({ 1, 2, 3 }))); // not sealed
    CHECK(seal(path, 12 + 4 * 7 + 50));
    CHECK(is_whole(path, stamp.on({ 1, 2, 3 })));
    CHECK(!is_whole(path, stamp.on({ 1, 2, 4 })));
    CHECK(!is_whole(path, stamp.on({ 1, 2 })));
    CHECK(!is_whole(path, stamp.on({ 1, 2, 3, 4 })));
    draft_stamp other = stamp;
    other.add("and more");
    CHECK(!is_whole(path, other.on({ 1, 2, 3 })));
    std::ofstream(path, std::ios::app) << "y";
    CHECK(!is_whole(path, stamp.on({ 1, 2, 3 })));
    write_file(path, stamp.on({ 1, 2, 3 }), state.substr(1));
    CHECK(seal(path, 12 + 4 * 7 + 50)); // cut short afterwards
    CHECK(!is_whole(path, stamp.on({ 1, 2, 3 })));
    std::ofstream(path) << "nothing";
    CHECK(!is_whole(path, stamp.on({})));
}

static void a_file_gets_its_name_when_it_is_complete() {
    const std::string name = folder + "/cache";
    const std::string made = name + ".tmp";
    std::ofstream(made) << "one";
    CHECK(settle(made, name, true));
    CHECK(text_of(name) == "one" && !exists(made));
    std::ofstream(made) << "two";
    CHECK(settle(made, name, true));
    CHECK(text_of(name) == "two");
    std::ofstream(made) << "half";
    CHECK(!settle(made, name, false));
    CHECK(!exists(made) && !exists(name)); // what was there is of another time
}

int main(int argc, char ** argv) {
    folder = argc > 1 ? argv[1] : ".";
    a_stamp_tells_drafters_apart();
    only_a_whole_file_of_these_tokens_counts();
    a_file_gets_its_name_when_it_is_complete();
    return failures();
}
