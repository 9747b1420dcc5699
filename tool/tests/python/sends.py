"""Sends a file and exits at once.

    python3 sends.py ADDRESS PORT FILE
"""
import os, socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(open(sys.argv[3], 'rb').read())
os._exit(0)
