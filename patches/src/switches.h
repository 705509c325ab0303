// Turning single patches off in a built program, to measure them and to tell a fault of ours from one of
// llama.cpp's: DFLASHCPP_OFF="top-k,draft-arena". Names are listed in patches/README.md.
//
// Plain C++, so that this file compiles and is tested without llama.cpp.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>

namespace dflashcpp {

// Whether `name` is one of the entries of a comma-separated list; spaces around entries do not count.
inline bool lists(const std::string & list, const std::string & name) {
    size_t begin = 0;
    while (begin <= list.size()) {
        const size_t comma = std::min(list.find(',', begin), list.size());
        const size_t first = list.find_first_not_of(' ', begin);
        const size_t last  = list.find_last_not_of(' ', comma == 0 ? 0 : comma - 1);
        if (first < comma && last != std::string::npos && last >= first && list.compare(first, last - first + 1, name) == 0) {
            return true;
        }
        begin = comma + 1;
    }
    return false;
}

// Whether DFLASHCPP_OFF names this; ask once and keep the answer, the environment does not change.
inline bool is_off(const char * name) {
    const char * list = std::getenv("DFLASHCPP_OFF");
    return list != nullptr && lists(list, name);
}

} // namespace dflashcpp
