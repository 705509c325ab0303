# $1 final folder, $2 archive of the source, $3 jobs, then cmake's -D settings. What runs is ended with us.
final=$1 archive=$2 jobs=$3
shift 3
work="$final.work"
log="$work/build.log"
step() {
    "$@" >>"$log" 2>&1 &
    running=$!
    trap 'kill -INT "$running" 2>/dev/null; exit 1' TERM # ninja hands SIGINT on to its compilers
    while kill -0 "$running" 2>/dev/null; do
        tail -n 1 "$log" >&2
        pause
    done
    wait "$running" || {
        grep -iE '(error|fatal):|CMake Error|No space left' "$log" | head -n 3 >&2
        fail "${1##*/} failed over there; its log: $log" 3
    }
}
rm -rf "$work/llama.cpp"
mkdir -p "$work/llama.cpp" || fail "the folder $work cannot be made" 3
: >"$log" || fail "nothing can be written in $work" 3
step tar -xzf "$archive" -C "$work/llama.cpp"
if command -v ninja >/dev/null 2>&1; then generator=Ninja maker='ninja -C'; else generator='Unix Makefiles' maker='make -C'; fi
step cmake -S "$work/llama.cpp" -B "$work/build" -G "$generator" "$@"
step $maker "$work/build" -j "$jobs" llama-server
[ -x "$work/build/bin/llama-server" ] || fail "no llama-server came out; the log: $log" 3
rm -rf "$final"
mv "$work/build" "$final" && rm -rf "$work" "$archive"
