// A safetensors file that gets its name later, when those of other ranks are on the disk too.
#pragma once

#include "smp/detail/durable_file.h"
#include "smp/safetensors.h"

namespace smp::detail {

/// As smp::write_safetensors, without the commit: all bytes are on the disk when it returns.
void write_safetensors(DurableFile& out, const Safetensors& file);

}  // namespace smp::detail
