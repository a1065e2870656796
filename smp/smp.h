// All of smp, in the order in which a training script uses it.
#pragma once

#include "smp/version.h"
#include "smp/config.h"
#include "smp/init.h"
#include "smp/fields.h"
#include "smp/serialiser.h"
#include "smp/comm.h"
#include "smp/partition.h"
#include "smp/hooks.h"
#include "smp/distributed_model.h"
#include "smp/distributed_optimizer.h"
#include "smp/step.h"
#include "smp/step_output.h"
#include "smp/clip.h"
#include "smp/state_dict.h"
#include "smp/state_file.h"
#include "smp/safetensors.h"
