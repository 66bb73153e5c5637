// Lets a library from a recent compiler be loaded with an older libstdc++ of another system.
#include <new>

#if defined(__GLIBCXX__)
namespace std {
// The headers of GCC 11 and later call this function, which libstdc++ has since GLIBCXX_3.4.29. It is called if more
// memory is requested than there are addresses.
__attribute__((visibility("hidden"), weak, noreturn)) void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif
