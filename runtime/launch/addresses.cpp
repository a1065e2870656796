// Asks the kernel.
#include "runtime/launch/addresses.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace smp::runtime {
namespace {

namespace fs = std::filesystem;

// Of the sockets that listen on the port, as links of /proc/PID/fd name them.
std::set<std::string> listening_sockets(int port) {
  constexpr const char* kListens = "0A";
  std::set<std::string> found;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);  // names of the columns
    while (std::getline(lines, line)) {
      std::istringstream fields(line);
      std::array<std::string, 10> columns;  // number, own address, other address, state, ..., inode
      for (std::string& column : columns) fields >> column;
      const size_t colon = columns[1].rfind(':');
      if (colon == std::string::npos || columns[3] != kListens) continue;
      if (std::strtol(columns[1].c_str() + colon + 1, nullptr, 16) == port) found.insert("socket:[" + columns[9] + "]");
    }
  }
  return found;
}

bool holds_one(const fs::path& process, const std::set<std::string>& sockets) {
  std::error_code error;
  for (fs::directory_iterator each(process / "fd", error), end; !error && each != end; each.increment(error)) {
    std::error_code ignored;  // of a file that has been closed meanwhile
    if (sockets.contains(fs::read_symlink(each->path(), ignored))) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> own_addresses() {
  std::vector<std::string> found;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return found;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    const bool is_of_network = each->ifa_addr != nullptr && each->ifa_addr->sa_family == AF_INET &&
                               (each->ifa_flags & IFF_LOOPBACK) == 0 && (each->ifa_flags & IFF_UP) != 0;
    if (!is_of_network) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, text.data(), text.size());
    found.push_back(std::string(each->ifa_name) + " " + text.data());
  }
  freeifaddrs(all);
  return found;
}

std::string listener_on(int port) {
  const std::set<std::string> sockets = listening_sockets(port);
  if (sockets.empty()) return "";
  std::error_code error;
  for (fs::directory_iterator each("/proc", error), end; !error && each != end; each.increment(error)) {
    const std::string pid = each->path().filename();
    if (!std::all_of(pid.begin(), pid.end(), [](char c) { return c >= '0' && c <= '9'; })) continue;
    if (!holds_one(each->path(), sockets)) continue;
    std::string name;
    std::getline(std::ifstream(each->path() / "comm"), name);
    return "pid " + pid + " (" + name + ")";
  }
  return "";
}

}  // namespace smp::runtime
