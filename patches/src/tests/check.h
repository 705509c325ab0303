// The smallest possible test tool: CHECK prints where it failed, failures() is the exit code.

#pragma once

#include <cstdio>

inline int & failures() {
    static int count = 0;
    return count;
}

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
            ++failures();                                                                 \
        }                                                                                 \
    } while (0)
