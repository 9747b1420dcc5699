"""Resets reach programs that do not read, and half-closed connections.

    python3 resets.py serve|call ADDRESS PORT
"""
import select, socket, struct, sys
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])

def reset(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    s.close()

def wait_for_reset(s, case):
    poll = select.poll()
    poll.register(s, 0)
    events = poll.poll(50000)
    assert events and events[0][1] & select.POLLERR, (case, events)
    error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    print(case, error, flush=True)

if role == 'serve':
    listener = socket.create_server((host, port))
    # Nobody reads, and the relays are full.
    s, _ = listener.accept()
    wait_for_reset(s, 'full')
    # The peer resets after it has shut down its direction.
    s, _ = listener.accept()
    assert s.recv(10) == b'x' and s.recv(10) == b''
    s.sendall(b'k')
    wait_for_reset(s, 'half-closed')
    # This end does.
    s, _ = listener.accept()
    s.shutdown(socket.SHUT_WR)
    assert s.recv(10) == b'x'
    reset(s)
else:
    s = socket.create_connection((host, port))
    s.settimeout(2)
    try:
        while True:
            s.sendall(bytes(1 << 20))
    except TimeoutError:
        pass
    reset(s)
    s = socket.create_connection((host, port))
    s.sendall(b'x')
    s.shutdown(socket.SHUT_WR)
    assert s.recv(10) == b'k'
    reset(s)
    s = socket.create_connection((host, port))
    assert s.recv(10) == b''
    s.sendall(b'x')
    wait_for_reset(s, 'half-closed by the peer')
print('all is well', flush=True)
