// What Open MPI runs with after smp::init, under an mpirun that was given no setting.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstring>
#include <string>
#include <vector>

#include "smp/init.h"

namespace {

// The name of an enumerator, e.g. "none".
std::string name_in(MPI_T_enum type, int value) {
  int count = 0, ignored = 0;
  MPI_T_enum_get_info(type, &count, nullptr, &ignored);
  for (int i = 0; i < count; ++i) {
    char name[64];
    int length = sizeof(name), item = 0;
    MPI_T_enum_get_item(type, i, &item, name, &length);
    if (item == value) return name;
  }
  return std::to_string(value);
}

// An MCA variable as text, from MPI's tool interface (MPI 3.1, section 14.3.6): what is in force,
// not what the environment asks for.
std::string value_of(const char* variable) {
  int index = 0, count = 0, ignored = 0;
  if (MPI_T_cvar_get_index(variable, &index) != MPI_SUCCESS) return "no such variable";
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_T_enum enumeration = MPI_T_ENUM_NULL;
  MPI_T_cvar_get_info(index, nullptr, &ignored, &ignored, &type, &enumeration, nullptr, &ignored, &ignored, &ignored);
  MPI_T_cvar_handle handle = MPI_T_CVAR_HANDLE_NULL;
  MPI_T_cvar_handle_alloc(index, nullptr, &handle, &count);
  std::vector<char> bytes(static_cast<size_t>(count) * sizeof(int64_t) + 1);
  MPI_T_cvar_read(handle, bytes.data());
  MPI_T_cvar_handle_free(&handle);
  if (type == MPI_CHAR) return bytes.data();
  int value = 0;  // the low bytes of a longer type; all our settings are small
  std::memcpy(&value, bytes.data(), sizeof(value));
  return enumeration == MPI_T_ENUM_NULL ? std::to_string(value) : name_in(enumeration, value);
}

TEST(MpiSettings, AreMadeByInitAndNotByTheCommandLine) {
  smp::init();
  EXPECT_EQ(smp::size(), 2);
  int provided = 0;
  ASSERT_EQ(MPI_T_init_thread(MPI_THREAD_SINGLE, &provided), MPI_SUCCESS);
  EXPECT_EQ(value_of("pml"), "ob1");
  EXPECT_EQ(value_of("btl"), "self,vader");
  EXPECT_EQ(value_of("btl_vader_single_copy_mechanism"), "none");
  EXPECT_EQ(value_of("btl_vader_eager_limit"), "16384");
  MPI_T_finalize();
  smp::shutdown();
}

}  // namespace
