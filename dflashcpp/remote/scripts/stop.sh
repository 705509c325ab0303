# $1 name, $2 seconds of grace. Ends exactly the process that was noted, by pid, start time and program.
dir=$(server_dir "$1")
[ -d "$dir" ] || exit 25
rm -f "$dir.key" "$HOME/.local/state/dflashcpp/remote/$1.key"
if ! running "$dir"; then
    report "$dir"
    rm -f "$dir/pid"
    exit 26
fi
kill -TERM "$pid"
kill -CONT "$pid" 2>/dev/null
left=$(($2 * 5))
while running "$dir" && [ "$left" -gt 0 ]; do pause; left=$((left - 1)); done
if running "$dir"; then kill -KILL "$pid"; fi
left=25
while running "$dir" && [ "$left" -gt 0 ]; do pause; left=$((left - 1)); done
if running "$dir"; then fail "process $pid does not end" 27; fi
left=5
while [ ! -f "$dir/exit" ] && [ "$left" -gt 0 ]; do pause; left=$((left - 1)); done
report "$dir"
rm -f "$dir/pid"
