# sha256 of one file; remembered beside size, time and inode, since a target takes a minute to read.
[ -r "$1" ] || fail "$1 cannot be read" 3
notes="$(state_dir)/digests"
note="$notes/$(printf '%s' "$1" | cksum | tr ' ' -)"
stamp="$(stamp_of "$1") $1"
if [ "$(sed -n 1p "$note" 2>/dev/null)" = "$stamp" ]; then sed -n 2p "$note"; exit; fi
scratch=$(mktemp) || exit 1
trap 'kill "$reader" 2>/dev/null; rm -f "$scratch"' EXIT
trap 'exit 1' TERM
if command -v sha256sum >/dev/null 2>&1; then sha256sum <"$1" >"$scratch" &
elif command -v shasum >/dev/null 2>&1; then shasum -a 256 <"$1" >"$scratch" &
else openssl dgst -r -sha256 <"$1" >"$scratch" & fi
reader=$!
wait "$reader" || fail "the sha256 of $1 could not be computed" 3
digest=$(cut -c 1-64 "$scratch")
mkdir -p "$notes" 2>/dev/null && printf '%s\n%s\n' "$stamp" "$digest" >"$note" 2>/dev/null
printf '%s\n' "$digest"
