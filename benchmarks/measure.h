// How benchmarks take time and print: rounds, medians, and the line "name value unit".
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace smp::benchmarks {

/// Of a clock that never goes back.
double seconds_now();

/// The middle one (the upper of two); `values` must not be empty.
double median(std::vector<double> values);

/// Seconds of one call.
double seconds_of(const std::function<void()>& work);

/// `work`, so often.
std::function<void()> repeated(int times, std::function<void()> work);

struct Comparison {
  double ratio = 0;          // median over the rounds of first / second
  double first_seconds = 0;  // medians
  double second_seconds = 0;
  double extra_seconds = 0;  // median over the rounds of first - second
};

/// Times both in turn, `rounds` times, so that a change of the machine's load meets both alike; the
/// order changes from round to round. Two rounds before them are not counted.
Comparison compare(int rounds, const std::function<void()>& first, const std::function<void()>& second);

/// True when the command line asks for all measures or for this one.
bool is_wanted(int argc, char** argv, const std::string& measure);

/// Prints "name value unit" and, in brackets, the raw figures behind it.
void report(const std::string& name, double value, const std::string& unit,
            const std::vector<std::pair<std::string, double>>& raw = {});

/// Ends the program with status 1 and `message` unless `holds`: a wrong result is no measurement.
void require(bool holds, const std::string& message);

}  // namespace smp::benchmarks
