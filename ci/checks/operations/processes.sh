#!/bin/bash
# The two programs.

# The server is stopped for 3 s.
# quick
# seconds: 8
process_server_stops() {
    kill -STOP "$SERVER"
    sleep 3
    kill -CONT "$SERVER"
}

# The client is stopped for 3 s.
# seconds: 8
# worse: an exchange that the stop cuts takes as long as the stop, with either
process_client_stops() {
    kill -STOP "$CLIENT"
    sleep 3
    kill -CONT "$CLIENT"
}

# The server is killed.
# quick
process_server_killed() { kill -KILL "$SERVER"; }

# Four busy loops run for 3 s.
# seconds: 8
process_busy() {
    for _ in 1 2 3 4; do
        timeout 3 bash -c 'while :; do :; done' &
    done
    wait
}
