"""Answers each connection with its name and what it has received. With a third argument it forks a child that outlives it.

    python3 named_server.py NAME PORT [FORK]
"""
import os, socket, sys, time
name, port = sys.argv[1], int(sys.argv[2])
listener = socket.create_server(('', port))
if len(sys.argv) > 3 and os.fork() == 0:
    listener.close()
    os.close(1)
    os.close(2)
    while os.path.exists(sys.argv[0]):
        time.sleep(0.1)
    os._exit(0)
while True:
    connection, _ = listener.accept()
    received = b''
    while data := connection.recv(100):
        received += data
    connection.sendall(name.encode() + b' has ' + received)
    connection.close()
