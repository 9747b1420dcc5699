/* Echoes what each connection to the port argv[1] sends, until its end: libevent's bufferevents. */
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

static void flushed(struct bufferevent *connection, void *context)
{
    (void)context;
    if (evbuffer_get_length(bufferevent_get_output(connection)) == 0)
        bufferevent_free(connection);
}

static void readable(struct bufferevent *connection, void *context)
{
    (void)context;
    bufferevent_write_buffer(connection, bufferevent_get_input(connection));
}

static void ended(struct bufferevent *connection, short what, void *context)
{
    (void)context;
    if (what & BEV_EVENT_EOF) {
        bufferevent_setcb(connection, NULL, flushed, ended, NULL);
        bufferevent_disable(connection, EV_READ);
        flushed(connection, NULL);
    } else {
        bufferevent_free(connection);
    }
}

static void accepted(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *from, int len, void *base)
{
    (void)listener;
    (void)from;
    (void)len;
    struct bufferevent *connection = bufferevent_socket_new(base, fd, BEV_OPT_CLOSE_ON_FREE);
    bufferevent_setcb(connection, readable, NULL, ended, NULL);
    bufferevent_enable(connection, EV_READ | EV_WRITE);
}

int main(int argc, char **argv)
{
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons(argc > 1 ? atoi(argv[1]) : 0);
    struct event_base *base = event_base_new();
    unsigned flags = LEV_OPT_REUSEABLE | LEV_OPT_CLOSE_ON_FREE;
    if (!evconnlistener_new_bind(base, accepted, base, flags, 16, (struct sockaddr *)&address, sizeof address))
        return 1;
    return event_base_dispatch(base);
}
