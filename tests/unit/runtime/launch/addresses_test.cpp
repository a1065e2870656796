// What this host has, and who listens.
#include "runtime/launch/addresses.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

namespace smp::runtime {
namespace {

TEST(Addresses, AreThoseOfNetworks) {
  for (const std::string& each : own_addresses()) {
    const size_t blank = each.find(' ');
    ASSERT_NE(blank, std::string::npos) << each;
    in_addr address{};
    EXPECT_EQ(inet_pton(AF_INET, each.c_str() + blank + 1, &address), 1) << each;
    EXPECT_NE(each.substr(0, blank), "lo");
  }
}

TEST(Listener, IsTheProcessThatHoldsThePort) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  socklen_t length = sizeof address;
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  const int port = ntohs(address.sin_port);
  EXPECT_EQ(listener_on(port), "");  // bound, and yet nobody listens
  ASSERT_EQ(listen(socket, 1), 0);
  EXPECT_EQ(listener_on(port).find("pid " + std::to_string(getpid()) + " ("), 0u) << listener_on(port);
  close(socket);
  EXPECT_EQ(listener_on(port), "");
}

}  // namespace
}  // namespace smp::runtime
