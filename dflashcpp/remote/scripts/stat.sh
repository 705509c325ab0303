for path; do
    if [ -d "$path" ]; then echo folder
    elif [ -r "$path" ]; then printf 'file %s\n' "$(size_of "$path")"
    elif [ -e "$path" ]; then echo unreadable
    else echo missing; fi
done
