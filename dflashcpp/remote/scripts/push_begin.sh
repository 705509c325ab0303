# $1 final path, $2 its partial name, $3 bytes still to come when nothing is there yet
folder=$(dirname -- "$1")
mkdir -p -- "$folder" || fail "the folder $folder cannot be made" 3
[ -w "$folder" ] || fail "the folder $folder cannot be written" 3
have=0
[ -f "$2" ] && have=$(size_of "$2")
free=$(df -Pk -- "$folder" 2>/dev/null | awk 'NR == 2 {print $4}')
printf 'have=%s\nfree_kib=%s\nfolder=%s\n' "$have" "$free" "$folder"
