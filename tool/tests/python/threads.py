"""Exchanges data while the library may be unable to start threads.

    python3 threads.py serve|call ADDRESS PORT
"""
import socket, sys
role, address = sys.argv[1], (sys.argv[2], int(sys.argv[3]))

def outcome(s, answer):
    s.settimeout(20)
    try:
        data = s.recv(5)
        if data == b'hello':
            s.sendall(answer)
            return 'echoed'
        return 'stopped' if data == b'stop!' else 'wrong: the end'
    except (ConnectionResetError, BrokenPipeError):
        return 'reset'
    except TimeoutError:
        return 'wrong: half-open'

if role == 'serve':
    listener = socket.create_server(address)
    print('ready', flush=True)
    end = None
    while end != 'stopped':
        s, _ = listener.accept()
        end = outcome(s, b'hello')
        s.close()
        print(end, flush=True)
elif role == 'call':
    try:
        s = socket.create_connection(address)
        s.sendall(b'hello')
        print(outcome(s, b''))
    except (ConnectionResetError, BrokenPipeError):
        print('reset')
else:
    socket.create_connection(address).sendall(b'stop!')
