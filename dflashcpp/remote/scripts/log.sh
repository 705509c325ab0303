# $1 name, $2 first byte (from 1), $3 follow or show. Ends with the server, and then tells its exit status.
dir=$(server_dir "$1")
[ -r "$dir/log" ] || exit 25
if [ "$3" = show ]; then tail -c "+$2" "$dir/log"; exit; fi
tail -c "+$2" -f "$dir/log" 2>/dev/null &
tail=$!
trap 'kill "$tail" 2>/dev/null' EXIT
trap 'exit 1' TERM
while running "$dir"; do pause; done
pause
tries=0
while [ ! -f "$dir/exit" ] && [ "$tries" -lt 10 ]; do pause; tries=$((tries + 1)); done
pause
exit 30
