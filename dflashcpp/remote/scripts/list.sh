for dir in "$(state_dir)"/remote/*/; do
    [ -f "$dir/facts" ] && basename "$dir"
done
true
