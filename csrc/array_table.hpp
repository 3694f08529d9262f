// The search for a layout's arrays in flat dicts and lists of NumPy's and torch's own arrays.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "parts.hpp"

namespace afflux::python {

// Returns whether the type of each value is numpy.ndarray, torch.Tensor or torch.nn.Parameter, and no other subclass.
// Does not import torch.
bool all_own(const pybind11::iterable& values);

// The class _engine.ArrayTable: the names and shapes of some arrays of a layout, in its order.
struct ArrayTable {
  // Returns a list of the wanted arrays, of any shape and dtype. Returns None for a tree of another type, for one that
  // holds anything but NumPy's and torch's own arrays, lacks a wanted array, or holds an unknown one, and for a dict
  // with a key that is no str.
  pybind11::object find(pybind11::handle tree) const;
  // Returns whether a tree is a list of the wanted arrays alone, in their order, for a layout with names.
  bool is_bare(pybind11::handle tree) const;
  // Returns the arguments of the constructor, for copies in other processes.
  pybind11::tuple arguments() const { return pybind11::make_tuple(names, shapes, known, places, longest, in_order); }
  pybind11::object find_in_dict(pybind11::handle tree) const;

  const pybind11::tuple names, shapes;
  const pybind11::object known;  // the names that a dict may hold, a set; None: any names
  // The indices of the wanted arrays in a list, which has at most `longest` arrays, as many as there are known names.
  // Without places only a list of the wanted arrays alone is accepted, and only if `in_order`: it is known by the
  // shapes.
  const std::vector<pybind11::ssize_t> places;
  const pybind11::ssize_t longest;
  const bool in_order;
};

// Returns what determines the layout of a flat dict of NumPy's and torch's own arrays, and the arrays that are made
// like its own: the names, types, dtypes and shapes, as a tuple. Returns None for other trees, and for dicts with a
// name that is no str, or a tensor that is not on the host or begins where another one does.
pybind11::object structure(pybind11::handle tree);

// Returns whether an array of a list is of float64.
bool has_float64(const pybind11::list& arrays);

// Returns vectors in parts, with the borders of the vector `like`: the arrays of each tree, which are lent. They are
// read as float64 if one of them is float64, else as float32. Returns None if a tree is left to Python, or if trees
// share memory.
pybind11::object lend_trees(const ArrayTable& table, const PartsObject& like, const pybind11::list& trees);

void bind_array_table(pybind11::module_& module);

}  // namespace afflux::python
