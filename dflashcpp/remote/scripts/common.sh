# Shared by the scripts that run on the far side. POSIX sh; nothing stays there but state and logs.
fail() { printf '%s\n' "$1" >&2; exit "${2:-1}"; }
state_dir() { printf '%s' "${XDG_STATE_HOME:-$HOME/.local/state}/dflashcpp"; }
server_dir() { printf '%s/remote/%s' "$(state_dir)" "$1"; }
pause() { sleep 0.2 2>/dev/null || sleep 1; }

# Clock ticks since boot, which do not move with the wall clock; elsewhere what ps says.
start_time() {
    if [ -r "/proc/$1/stat" ]; then
        line=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
        line=${line##*) }
        set -- $line
        [ "$1" != Z ] || return 1
        shift 19
        printf 'ticks %s' "$1"
    else
        line=$(ps -o lstart= -p "$1" 2>/dev/null) && [ -n "$line" ] && printf '%s' "$line"
    fi
}
program_of() { readlink "/proc/$1/exe" 2>/dev/null || ps -o comm= -p "$1" 2>/dev/null; }

# The pidfile holds three lines: pid, start time, program. Only this very process counts as running.
noted() { sed -n "$2p" "$1/pid" 2>/dev/null; }
running() {
    pid=$(noted "$1" 1)
    began=$(noted "$1" 2)
    [ -n "$pid" ] && [ -n "$began" ] && [ "$(start_time "$pid")" = "$began" ]
}
report() {
    printf 'pid=%s\n' "$(noted "$1" 1)"
    printf 'started=%s\n' "$(noted "$1" 2)"
    printf 'program=%s\n' "$(noted "$1" 3)"
    if running "$1"; then echo running=yes; else echo running=no; fi
    printf 'exit=%s\n' "$(cat "$1/exit" 2>/dev/null)"
    printf 'log=%s\n' "$1/log"
    printf 'facts=%s\n' "$(cat "$1/facts" 2>/dev/null)"
}
size_of() { stat -L -c %s -- "$1" 2>/dev/null || stat -L -f %z -- "$1" 2>/dev/null || wc -c <"$1"; }
stamp_of() { stat -L -c '%s %Y %i' -- "$1" 2>/dev/null || stat -L -f '%z %m %i' -- "$1" 2>/dev/null; }
