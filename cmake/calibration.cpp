// Fixed work of the kinds that tests do: numbers, memory, text, one thread after the other. cmake/SmpTest.cmake compiles
// it as the tests are compiled, and takes its time for how slow this build is on this machine.
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

int main() {
  uint64_t sum = 0;
  for (int round = 0; round < 300; ++round) {
    std::thread([&] {
      std::vector<double> numbers(100000, round);
      for (int pass = 0; pass < 20; ++pass) {
        for (double& number : numbers) number = number * 0.5 + pass;
      }
      std::map<std::string, double> by_name;
      for (int i = 0; i < 5000; ++i) by_name["tensor." + std::to_string(i * 7919 % 5000)] += numbers[i];
      sum += by_name.size();
    }).join();
  }
  return sum == 300 * 5000 ? 0 : 1;
}
