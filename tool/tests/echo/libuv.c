/* Echoes what each connection to the port argv[1] sends, until its end: libuv's streams. */
#include <stdlib.h>
#include <uv.h>

static void closed(uv_handle_t *connection)
{
    free(connection);
}

static void shut(uv_shutdown_t *request, int status)
{
    (void)status;
    uv_close((uv_handle_t *)request->handle, closed);
    free(request);
}

static void written(uv_write_t *request, int status)
{
    (void)status;
    free(request->data);
    free(request);
}

static void room(uv_handle_t *connection, size_t suggested, uv_buf_t *buffer)
{
    (void)connection;
    *buffer = uv_buf_init(malloc(suggested), suggested);
}

static void readable(uv_stream_t *connection, ssize_t len, const uv_buf_t *buffer)
{
    if (len > 0) {
        uv_write_t *request = malloc(sizeof *request);
        uv_buf_t piece = uv_buf_init(buffer->base, len);
        request->data = buffer->base;
        uv_write(request, connection, &piece, 1, written);
        return;
    }
    free(buffer->base);
    if (len == UV_EOF)
        uv_shutdown(malloc(sizeof(uv_shutdown_t)), connection, shut);
    else if (len < 0)
        uv_close((uv_handle_t *)connection, closed);
}

static void accepted(uv_stream_t *listener, int status)
{
    if (status < 0)
        return;
    uv_tcp_t *connection = malloc(sizeof *connection);
    uv_tcp_init(listener->loop, connection);
    uv_accept(listener, (uv_stream_t *)connection);
    uv_read_start((uv_stream_t *)connection, room, readable);
}

int main(int argc, char **argv)
{
    struct sockaddr_in address;
    uv_tcp_t listener;
    uv_ip4_addr("0.0.0.0", argc > 1 ? atoi(argv[1]) : 0, &address);
    uv_tcp_init(uv_default_loop(), &listener);
    if (uv_tcp_bind(&listener, (struct sockaddr *)&address, 0) || uv_listen((uv_stream_t *)&listener, 16, accepted))
        return 1;
    return uv_run(uv_default_loop(), UV_RUN_DEFAULT);
}
