"""Accepts connections and never reads.

    python3 silent.py ADDRESS PORT
"""
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
kept = []
while True:
    kept.append(listener.accept())
