// The file with the draft cache of a saved slot, "NAME.draft" beside the target's "NAME": llama.cpp's own
// file of a sequence, whose list of tokens begins with the length of the file and a stamp of the drafter. It
// counts only if it is whole, of the same drafter, and of the very tokens that the target's file has: the one
// without the other, or two of different times, would make the drafter see what was never said, and
// llama.cpp aborts on a file that was cut short.
//
// Layout as llama-context.cpp writes it (state_seq_save_file): u32 magic, u32 version, u32 n, n tokens, state.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace dflashcpp {

inline std::string draft_file_name(const std::string & slot_file) { return slot_file + ".draft"; }

// FNV-1a over all that is told of a drafter.
class draft_stamp {
public:
    void add(const std::string & text) {
        for (const char c : text) {
            mix(uint8_t(c));
        }
        mix(0); // "ab", "c" is not "a", "bc"
    }

    // `tokens` behind room for the length and the stamp, as the file has them.
    std::vector<int32_t> on(const std::vector<int32_t> & tokens) const {
        std::vector<int32_t> all = { 0, 0, int32_t(uint32_t(hash)), int32_t(uint32_t(hash >> 32)) };
        all.insert(all.end(), tokens.begin(), tokens.end());
        return all;
    }

private:
    void mix(uint8_t byte) { hash = (hash ^ byte) * 1099511628211ull; }

    uint64_t hash = 14695981039346656037ull;
};

constexpr std::streamoff length_at = 3 * sizeof(uint32_t);

// Notes the length of a complete file in it.
inline bool seal(const std::string & path, uint64_t length) {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(length_at);
    file.write(reinterpret_cast<const char *>(&length), sizeof(length));
    file.flush();
    return bool(file);
}

// Whether the file is there, whole, and its list is `tokens`, as draft_stamp::on() gives them.
inline bool is_whole(const std::string & path, const std::vector<int32_t> & tokens) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const std::streamoff size = file ? std::streamoff(file.tellg()) : 0;
    uint32_t head[3] = {};
    uint64_t length  = 0;
    file.seekg(0);
    file.read(reinterpret_cast<char *>(head), sizeof(head));
    file.read(reinterpret_cast<char *>(&length), sizeof(length));
    if (!file || head[2] != tokens.size() || length != uint64_t(size)) {
        return false;
    }
    std::vector<int32_t> found(tokens.size() - 2);
    file.read(reinterpret_cast<char *>(found.data()), std::streamsize(found.size() * sizeof(int32_t)));
    return bool(file) && std::equal(found.begin(), found.end(), tokens.begin() + 2);
}

// Gives a complete file its name; written == false: it is not complete, and what had the name before is of
// another time. Returns whether there is a file of that name now.
inline bool settle(const std::string & made, const std::string & name, bool written) {
    if (written) {
#ifdef _WIN32
        std::remove(name.c_str()); // there rename() does not replace
#endif
        if (std::rename(made.c_str(), name.c_str()) == 0) {
            return true;
        }
    }
    std::remove(made.c_str());
    std::remove(name.c_str());
    return false;
}

} // namespace dflashcpp
