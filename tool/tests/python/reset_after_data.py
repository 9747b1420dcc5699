"""Data before a reset can be read.

    python3 reset_after_data.py read|reset ADDRESS PORT
"""
import socket, struct, sys, time
role, address = sys.argv[1], (sys.argv[2], int(sys.argv[3]))
if role == 'read':
    listener = socket.create_server(address)
    for _ in range(2):
        connection, _ = listener.accept()
        time.sleep(0.6)
        received = 0
        try:
            while data := connection.recv(10000):
                received += len(data)
            print(received, 'the end')
        except ConnectionResetError:
            print(received, 'reset')
    connection, _ = listener.accept()
    connection.settimeout(5)
    try:
        while True:
            connection.sendall(bytes(1000))
    except (ConnectionResetError, BrokenPipeError):
        print('broken')
else:
    for ends in (False, True, False):
        s = socket.create_connection(address)
        s.sendall(bytes(1000000))
        if ends:
            s.shutdown(socket.SHUT_WR)
        time.sleep(0.3)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        s.close()
        time.sleep(0.6)
