// Owns which releases a rank runs; builds of one release are not told apart.
#pragma once

#include <string>
#include <vector>

namespace smp::engine {

/// "smp 0.1.0, LibTorch 2.11.0 of commit 70d99e9, for CUDA 13.0"
std::string versions();

/// texts: of versions(), by rank. Who has what, "ranks 0, 1 have A; rank 2 has B"; "" where all have the same.
std::string differing_versions(const std::vector<std::string>& texts);

}  // namespace smp::engine
