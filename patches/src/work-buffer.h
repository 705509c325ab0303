// Where in its memory the CPU backend's work buffer begins: at the start of a cache line.
//
// A matrix multiplication converts its activations into that buffer and reads them again for every row of the
// matrix. The allocator promises 16 bytes; rows that begin in the middle of a cache line take longest to read.
// Where they begin depends on what else the process allocated before, so that a server with a drafter can be
// slower than one without before it drafts anything.
//
// Plain C++, so that this file compiles and is tested without llama.cpp.

#pragma once

#include "switches.h"

#include <cstddef>
#include <cstdint>

namespace dflashcpp {

constexpr size_t work_line  = 64;             // bytes of a cache line
constexpr size_t work_slack = 2 * work_line;  // bytes to allocate beyond what is needed

// The first byte to use of a buffer that is `work_slack` bytes larger than needed. With DFLASHCPP_OFF=aligned-work
// it begins in the middle of a line, the worst of the places that malloc may choose.
inline uint8_t * work_begin(uint8_t * allocated, bool aligned) {
    const uintptr_t line = (reinterpret_cast<uintptr_t>(allocated) + work_line - 1) & ~uintptr_t(work_line - 1);
    return reinterpret_cast<uint8_t *>(line + (aligned ? 0 : work_line / 2));
}

inline uint8_t * work_begin(uint8_t * allocated) {
    static const bool aligned = !is_off("aligned-work");
    return work_begin(allocated, aligned);
}

} // namespace dflashcpp
