printf 'system=%s\n' "$(uname -sm)"
printf 'home=%s\n' "$HOME"
printf 'cores=%s\n' "$(getconf _NPROCESSORS_ONLN 2>/dev/null || nproc 2>/dev/null)"
printf 'memory_kib=%s\n' "$(awk '/^MemAvailable/ {print $2}' /proc/meminfo 2>/dev/null)"
printf 'free_kib=%s\n' "$(df -Pk "$HOME" 2>/dev/null | awk 'NR == 2 {print $4}')"
for name in dflashcpp llama-server cmake ninja make c++ nvcc; do
    found=$(command -v "$name" 2>/dev/null)
    for folder in "$HOME/.local/bin" /usr/local/bin /usr/local/cuda/bin /opt/llama.cpp/build/bin; do
        [ -z "$found" ] && [ -x "$folder/$name" ] && found="$folder/$name"
    done
    printf 'tool.%s=%s\n' "$name" "$found"
done
limit=
command -v timeout >/dev/null 2>&1 && limit='timeout 20'
if command -v nvidia-smi >/dev/null 2>&1; then
    $limit nvidia-smi "--query-gpu=$1" --format=csv,noheader,nounits 2>&1 | sed 's/^/gpu=/'
fi
