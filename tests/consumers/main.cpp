// What a user's first program needs of an smp that is installed or vendored: one header, one target.
#include <smp/version.h>

#include <cstdio>

int main() { std::printf("smp %s\n", smp::version()); }
