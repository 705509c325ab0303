// A stand-in for the memory of a device, for tests of what is said when a drafter does not fit:
// DFLASHCPP_DEVICE_MEMORY="Host=300,CUDA0=16000" in MiB.
//
// Plain types only, so that this file compiles and is tested without llama.cpp.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

namespace dflashcpp {

// MiB by device; entries that are no NAME=NUMBER are left out
inline std::map<std::string, int64_t> parse_limits(const char * text) {
    std::map<std::string, int64_t> limits;
    std::string rest = text ? text : "";
    while (!rest.empty()) {
        const size_t comma = rest.find(',');
        const std::string entry = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);

        const size_t equals = entry.find('=');
        if (equals == std::string::npos || equals == 0 || equals + 1 == entry.size()) {
            continue;
        }
        char * end = nullptr;
        const long long mib = std::strtoll(entry.c_str() + equals + 1, &end, 10);
        if (*end == '\0' && mib >= 0) {
            limits[entry.substr(0, equals)] = (int64_t) mib;
        }
    }
    return limits;
}

// MiB that this device is said to have free, -1 when nothing is said
inline int64_t limit_of(const std::string & device) {
    static const std::map<std::string, int64_t> limits = parse_limits(std::getenv("DFLASHCPP_DEVICE_MEMORY"));
    const auto found = limits.find(device);
    return found == limits.end() ? -1 : found->second;
}

} // namespace dflashcpp
