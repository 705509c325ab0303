"""llama-server behind SSH: tunnel, start and stop over there, files, logs. The system's OpenSSH does the work."""
