# $1 name, $2 facts as one JSON line, then the command
dir=$(server_dir "$1")
facts=$2
shift 2
umask 077
mkdir -p "$dir" || fail "the folder $dir cannot be made" 20
lock="$dir/lock"
tries=0
misses=0
until mkdir "$lock" 2>/dev/null; do
    [ -d "$lock" ] || misses=$((misses + 1)) # or it was given back just now
    [ "$misses" -lt 5 ] || fail "nothing can be written in $dir" 20
    [ -n "$(find "$lock" -prune -mmin +2 2>/dev/null)" ] && rmdir "$lock" 2>/dev/null
    tries=$((tries + 1))
    [ "$tries" -lt 50 ] || fail "another dflashcpp is starting a server there" 21
    pause
done
trap 'rmdir "$lock" 2>/dev/null' EXIT
if running "$dir"; then report "$dir"; exit 22; fi
[ -x "$1" ] || fail "$1 is not there or is no program" 23
rm -f "$dir/pid" "$dir/exit"
[ ! -f "$dir/log" ] || mv -f "$dir/log" "$dir/log.1"
printf '%s' "$facts" >"$dir/facts" && : >"$dir/log" && [ "$(size_of "$dir/facts")" -gt 0 ] ||
    fail "nothing can be written in $dir" 20
# Who asked is gone: nothing may be left that nobody knows of.
give_up() {
    tries=0
    while [ -z "$child" ] && [ -n "$begun" ] && [ "$tries" -lt 25 ]; do
        child=$(cat "$dir/child" 2>/dev/null) || pause
        tries=$((tries + 1))
    done
    [ -z "$child" ] || kill "$child" 2>/dev/null
    rm -f "$dir/child"
    rmdir "$lock" 2>/dev/null
    trap - EXIT
    exit 143
}
child=
begun=
trap give_up TERM HUP INT
apart=nohup
command -v setsid >/dev/null 2>&1 && apart=setsid
GGML_NO_BACKTRACE=1
export GGML_NO_BACKTRACE
# The small shell that stays waits for the server, to keep why it ended; it ends with it.
begun=yes
$apart sh -c '
    dir=$1
    shift
    "$@" >>"$dir/log" 2>&1 </dev/null &
    child=$!
    printf "%s\n" "$child" >"$dir/child"
    wait "$child"
    printf "%s\n" "$?" >"$dir/exit.new"
    mv -f "$dir/exit.new" "$dir/exit"
' dflashcpp-wait "$dir" "$@" >/dev/null 2>&1 </dev/null &
tries=0
while [ ! -s "$dir/child" ] && [ "$tries" -lt 25 ]; do pause; tries=$((tries + 1)); done
child=$(cat "$dir/child" 2>/dev/null)
rm -f "$dir/child"
[ -n "$child" ] || fail "the server did not start" 24
began=$(start_time "$child")
shell=$(program_of $$)
tries=0
while [ "$(program_of "$child")" = "$shell" ] && [ "$tries" -lt 5 ]; do pause; tries=$((tries + 1)); done
printf '%s\n%s\n%s\n' "$child" "$began" "$(program_of "$child")" >"$dir/pid" || {
    kill "$child"
    fail "nothing can be written in $dir" 20
}
report "$dir"
