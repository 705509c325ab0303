# $1 final path, $2 partial, $3 the digest it must have
[ -f "$2" ] || fail "$2 is gone" 3
sync "$2" 2>/dev/null || true
mv -f -- "$2" "$1" || fail "$2 cannot be renamed to $1" 3
