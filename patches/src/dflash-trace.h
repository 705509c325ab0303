// A record of what a DFlash drafter was fed and what it drafted, for tests against the reference.
//
// DFLASHCPP_TRACE=FILE makes the server append JSON lines to FILE and raw little-endian float32 to
// FILE.f32; unset, nothing is written and nothing is computed. The format is in patches/README.md.
//
// Plain types only, so that this file compiles and is tested without llama.cpp.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace dflashcpp {

class trace_writer {
public:
    explicit trace_writer(const char * path) {
        if (path == nullptr || *path == '\0') {
            return;
        }
        lines  = std::fopen(path, "ab");
        floats = std::fopen((std::string(path) + ".f32").c_str(), "ab");
        if (lines == nullptr || floats == nullptr) {
            std::fprintf(stderr, "DFLASHCPP_TRACE: cannot write %s or %s.f32, no trace\n", path, path);
            close();
        }
    }

    ~trace_writer() { close(); }

    trace_writer(const trace_writer &) = delete;
    trace_writer & operator=(const trace_writer &) = delete;

    bool on() const { return lines != nullptr; }

    // n_rows target rows of `width` floats each, written to the draft cache at `pos`
    void inject(int32_t seq, const std::vector<int32_t> & pos, const float * rows, size_t width) {
        if (!on()) {
            return;
        }
        const long offset = tell() / (long) sizeof(float);
        std::fwrite(rows, sizeof(float), pos.size() * width, floats);
        std::fflush(floats);
        std::fprintf(lines, "{\"event\":\"inject\",\"seq\":%d,\"width\":%zu,\"offset\":%ld,\"pos\":%s}\n",
                seq, width, offset, list(pos).c_str());
        std::fflush(lines);
    }

    // the candidates of one drafted position and their scores behind the token chosen before them
    template <class Id> void candidates(const Id * ids, const float * scores, int32_t n) {
        if (!on()) {
            return;
        }
        std::string ids_text;
        std::string scores_text;
        for (int32_t i = 0; i < n; ++i) {
            char buf[48];
            std::snprintf(buf, sizeof(buf), "%s%d", i ? "," : "", (int) ids[i]);
            ids_text += buf;
            std::snprintf(buf, sizeof(buf), "%s%.9g", i ? "," : "", (double) scores[i]);
            scores_text += buf;
        }
        lattice += (lattice.empty() ? "" : ",") + ("{\"ids\":[" + ids_text + "],\"scores\":[" + scores_text + "]}");
    }

    // one draft of one sequence: the anchor at pos0 and what was drafted behind it
    void draft(int32_t seq, int32_t pos0, int32_t anchor, const std::vector<int32_t> & drafted) {
        if (!on()) {
            return;
        }
        std::fprintf(lines, "{\"event\":\"draft\",\"seq\":%d,\"pos0\":%d,\"anchor\":%d,\"drafted\":%s,\"lattice\":[%s]}\n",
                seq, pos0, anchor, list(drafted).c_str(), lattice.c_str());
        std::fflush(lines);
        lattice.clear();
    }

private:
    std::FILE * lines  = nullptr;
    std::FILE * floats = nullptr;
    std::string lattice; // of the draft under way

    long tell() {
        std::fseek(floats, 0, SEEK_END);
        return std::ftell(floats);
    }

    void close() {
        for (std::FILE ** file : { &lines, &floats }) {
            if (*file != nullptr) {
                std::fclose(*file);
                *file = nullptr;
            }
        }
    }

    static std::string list(const std::vector<int32_t> & values) {
        std::string text = "[";
        for (size_t i = 0; i < values.size(); ++i) {
            text += (i ? "," : "") + std::to_string(values[i]);
        }
        return text + "]";
    }
};

// the trace of this process
inline trace_writer & trace() {
    static trace_writer writer(std::getenv("DFLASHCPP_TRACE"));
    return writer;
}

} // namespace dflashcpp
