"""Reads wait for as many bytes as SO_RCVLOWAT says.

    python3 low_mark.py serve|call ADDRESS PORT
"""
import socket, sys, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == 'serve':
    listener = socket.create_server((host, port))
    for turn in range(2):
        s, _ = listener.accept()
        while s.recv(1) == b'm':
            s.sendall(b'x' * 10)
            time.sleep(0.03)
            s.sendall(b'x' * 90)
else:
    def first_byte():
        # A program that polls: what comes stays in the stream.
        s.sendall(b'm')
        s.setblocking(False)
        while True:
            try:
                assert s.recv(1) == b'x'
                break
            except BlockingIOError:
                pass
        s.setblocking(True)

    for before in [False, True]:
        s = socket.socket()
        if before:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 50)
        s.connect((host, port))
        if not before:
            first_byte()
            assert s.recv(99, socket.MSG_WAITALL) == b'x' * 99
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 50)
        for _ in range(5):
            first_byte()
            got = s.recv(1000)
            assert len(got) == 99, (before, len(got))
        s.close()
print('all is well', flush=True)
