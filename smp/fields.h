// How smp sees into the structs of a program. Owns nothing.
#pragma once

#include <tuple>

namespace smp {

/// Names the members of a struct of yours that smp shall see. Specialise it; the members may be tensors, containers of
/// them, numbers, strings and other structs with Fields, and keep their order:
///
///   struct Batch {
///     at::Tensor ids, mask;
///     std::string name;
///   };
///   template <>
///   struct smp::Fields<Batch> {
///     static auto of(auto& batch) { return std::tie(batch.ids, batch.mask, batch.name); }
///   };
///
/// Then a step cuts the tensors of a Batch argument and leaves its other members as they are, a step body may return a
/// Batch, and smp::send and its kin transport one. What reads a Batch default-constructs it first, and members that `of`
/// does not name keep those values. `of` is called with const objects too, so it is a template. For private members make
/// `smp::Fields<Batch>` a friend.
template <class T>
struct Fields;

/// A struct whose Fields are known.
template <class T>
concept HasFields = requires(T& object) { std::tuple_size<decltype(Fields<T>::of(object))>::value; };

}  // namespace smp
