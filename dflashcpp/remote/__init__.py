"""llama-server behind SSH: tunnel, start and stop over there, files, logs, by the system's OpenSSH."""
