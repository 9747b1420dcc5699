// asio, which is boost.asio without the rest of Boost. "PORT" echoes what each connection sends, until its end; "HOST PORT" sends
// pieces of growing length, compares what comes back, and prints "all is well". asio registers a socket with epoll, edge-triggered,
// before it is connected.
#include <asio.hpp>
#include <iostream>
#include <memory>
#include <vector>

using asio::ip::tcp;

struct Echo : std::enable_shared_from_this<Echo> {
    tcp::socket socket;
    std::vector<char> bytes = std::vector<char>(70000);

    explicit Echo(tcp::socket accepted) : socket(std::move(accepted)) {}

    void run()
    {
        auto self = shared_from_this();
        socket.async_read_some(asio::buffer(bytes), [self](std::error_code error, std::size_t len) {
            if (error)
                return;
            asio::async_write(self->socket, asio::buffer(self->bytes, len), [self](std::error_code error, std::size_t) {
                if (!error)
                    self->run();
            });
        });
    }
};

static void serve(tcp::acceptor &acceptor)
{
    acceptor.async_accept([&acceptor](std::error_code error, tcp::socket socket) {
        if (!error)
            std::make_shared<Echo>(std::move(socket))->run();
        serve(acceptor);
    });
}

struct Call {
    tcp::socket socket;
    std::vector<char> out, back;
    std::size_t len = 1;

    explicit Call(asio::io_context &context) : socket(context) {}

    void run()
    {
        if (len > 500000) {
            std::cout << "all is well" << std::endl;
            return;
        }
        out.resize(len);
        for (std::size_t i = 0; i < len; i++)
            out[i] = static_cast<char>(i * 31 + (i >> 8) + len);
        back.assign(len, 0);
        asio::async_write(socket, asio::buffer(out), [this](std::error_code error, std::size_t) {
            if (error)
                std::cout << "write: " << error.message() << std::endl;
        });
        asio::async_read(socket, asio::buffer(back), [this](std::error_code error, std::size_t) {
            if (error || back != out) {
                std::cout << "read: " << error.message() << std::endl;
                return;
            }
            len = len * 3 + 1;
            run();
        });
    }
};

int main(int argc, char **argv)
{
    asio::io_context context;
    if (argc == 2) {
        tcp::acceptor acceptor(context, {tcp::v4(), static_cast<unsigned short>(std::stoi(argv[1]))});
        serve(acceptor);
        context.run();
        return 0;
    }
    Call call(context);
    tcp::endpoint peer(asio::ip::make_address(argv[1]), static_cast<unsigned short>(std::stoi(argv[2])));
    call.socket.async_connect(peer, [&call](std::error_code error) {
        if (error)
            std::cout << "connect: " << error.message() << std::endl;
        else
            call.run();
    });
    context.run();
    return 0;
}
