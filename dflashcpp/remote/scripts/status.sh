dir=$(server_dir "$1")
[ -d "$dir" ] || exit 25
report "$dir"
