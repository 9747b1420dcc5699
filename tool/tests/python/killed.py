"""One end exchanges a byte and is then killed; the other end expects a reset.

    python3 killed.py serve|call ADDRESS PORT
"""
import socket, sys, time
role, address = sys.argv[1], (sys.argv[2], int(sys.argv[3]))
if role == 'serve':
    connection, _ = socket.create_server(address).accept()
    assert connection.recv(1) == b'x'
    connection.settimeout(0.05)
    try:
        while True:
            connection.sendall(b'.')
            try:
                assert connection.recv(1) == b'', 'more data'
                print('the end')
                break
            except TimeoutError:
                pass
    except (ConnectionResetError, BrokenPipeError):
        print('reset')
else:
    s = socket.create_connection(address)
    s.sendall(b'x')
    # The capture is written at intervals.
    for _ in range(10):
        assert s.recv(1) == b'.'
    print('exchanged', flush=True)
    time.sleep(60)
