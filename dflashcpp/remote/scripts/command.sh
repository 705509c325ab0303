# A program on the far side, as it is; it ends when our end of the line goes.
"$@" &
program=$!
trap 'kill -TERM "$program" 2>/dev/null' TERM EXIT
wait "$program"
