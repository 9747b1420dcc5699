"""An echo, whose client uses a non-blocking socket in nested epoll sets.

    python3 program.py serve|call ADDRESS PORT [LOCAL ADDRESS]
"""
import os, select, socket, sys, time
role, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == 'serve':
    listener = socket.create_server((host, port))
    connection, peer = listener.accept()
    assert connection.getsockname() == (host, port), connection.getsockname()
    assert connection.getpeername() == peer
    print('accepted', peer[0], flush=True)
    while True:
        data = connection.recv(65536)
        if not data:
            break
        connection.sendall(data)
    connection.sendall(b'the end')
else:
    s = socket.socket()
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    epoll = select.epoll()
    # Registered before it is connected, as boost.asio does, and in a nested set.
    epoll.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    outer = select.epoll()
    outer.register(epoll, select.EPOLLIN)
    s.setblocking(False)
    try:
        s.connect((host, port))
    except BlockingIOError:
        pass
    assert outer.poll(10), 'the nested set'
    events = epoll.poll(10)
    assert any(e & select.EPOLLOUT for _, e in events), events
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    assert s.getsockname()[0] == sys.argv[4], s.getsockname()
    assert s.getpeername() == (host, port)
    assert s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    s.setblocking(True)
    s.settimeout(10)
    s.sendall(b'hello')
    assert s.recv(5, socket.MSG_WAITALL | socket.MSG_PEEK) == b'hello'
    assert s.recv(5) == b'hello'
    copy = os.dup(s.fileno())
    pid = os.fork()
    if pid == 0:
        # The child uses the connection of its parent, whose library has its threads there.
        assert s.getpeername() == (host, port)
        s.sendall(b'from the child')
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    got = b''
    while len(got) < 14:
        got += s.recv(100)
    assert got == b'from the child', got
    os.write(copy, b'by another number')
    os.close(copy)
    assert s.recv(17, socket.MSG_WAITALL) == b'by another number'
    with open(sys.argv[0], 'rb') as file:
        text = file.read()
        file.seek(0)
        s.sendfile(file)
    back = s.recv(len(text), socket.MSG_WAITALL)
    assert back == text, (len(back), len(text))
    s.shutdown(socket.SHUT_WR)
    rest = b''
    while True:
        data = s.recv(100)
        if not data:
            break
        rest += data
    assert rest == b'the end', rest
    # Nobody listens there: the fall-back's error is TCP's.
    try:
        socket.create_connection((host, port + 1), 5)
        raise AssertionError('connected')
    except ConnectionRefusedError:
        pass
    print('all is well', flush=True)
