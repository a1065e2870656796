"""Plants one violation of each rule in a small tree and sees check_device find exactly that one."""

import pathlib
import tempfile
import unittest

from check_device import violations_in

# A tree that keeps every rule, with the cases that come closest to breaking one.
CLEAN = {
    "runtime/device/cpu.cpp": "auto type = c10::kCPU;\nstd::memcpy(to, from, 4);\n",
    "runtime/kernels/cpu/dropout.cpp": "#include <ATen/CPUGeneratorImpl.h>\nauto* x = mask.mutable_data_ptr<float>();\n",
    "runtime/stage/stage.cpp": '// not is_cpu()\nauto text = "tensor.to(at::kCPU)";\nstorage.set_data_ptr(x);\nbytes_of(x);\n'
    "at::empty({2, 3}, options);\nat::TensorOptions(dtype).device(type);\nat::zeros_like(x, at::kLong);\nstorage.nbytes();\n",
    "runtime/exchange/wire.h": "std::memcpy(&number, bytes, 4);\n",
    "smp/step.cpp": "buffer.memory(4);\n",
    "tests/unit/x_test.cpp": "std::memcpy(to, x.const_data_ptr(), 4);\n",
}
EXCEPTIONS = {"runtime/exchange/wire.h": {"memcpy": "numbers"}}

# (file, text to append, what is reported there, on its line)
PLANTED = [
    ("smp/step.cpp", "x.to(at::kCPU);\n", "smp/step.cpp:2: kCPU only"),
    ("smp/step.cpp", "if (x.is_cuda()) return;\n", "smp/step.cpp:2: is_cuda only"),
    ("smp/step.cpp", "auto key = c10::DispatchKey::CPU;\n", "smp/step.cpp:2: DispatchKey::CPU only"),
    ("runtime/stage/stage.cpp", "auto key = c10::DispatchKey::AutocastCPU;\n", "runtime/stage/stage.cpp:9: AutocastCPU only"),
    ("runtime/stage/stage.cpp", "at::detail::getDefaultCPUGenerator();\n", "runtime/stage/stage.cpp:9: getDefaultCPUGenerator only"),
    ("runtime/stage/stage.cpp", "c10::GetCPUAllocator();\n", "runtime/stage/stage.cpp:9: GetCPUAllocator only"),
    ("runtime/stage/stage.cpp", "std::memcmp(a, b, 4);\n", "runtime/stage/stage.cpp:9: memcmp only"),
    ("runtime/stage/stage.cpp", "auto* x = tensor.data_ptr<float>();\n", "runtime/stage/stage.cpp:9: data_ptr only"),
    ("runtime/stage/stage.cpp", "tensor.mutable_data_ptr();\n", "runtime/stage/stage.cpp:9: mutable_data_ptr only"),
    ("runtime/stage/stage.cpp", "std::chrono::steady_clock::now();\n", "runtime/stage/stage.cpp:9: steady_clock only"),
    ("runtime/exchange/wire.h", "tensor.is_cpu();\n", "runtime/exchange/wire.h:2: is_cpu only"),
    ("smp/step.cpp", "c10::Device(c10::DeviceType::CPU);\n", "smp/step.cpp:2: DeviceType::CPU only"),
    ("smp/step.cpp", "storage._mutable_data_ptr_no_checks().get();\n", "smp/step.cpp:2: _mutable_data_ptr_no_checks only"),
    ("smp/step.cpp", "auto* x = tensor.storage().data();\n", "smp/step.cpp:2: storage().data only"),
    ("smp/step.cpp", "auto* x = known->storage.mutable_data();\n", "smp/step.cpp:2: storage.mutable_data only"),
    ("smp/step.cpp", "auto x = counts.accessor<double, 1>();\n", "smp/step.cpp:2: accessor only"),
    ("smp/step.cpp", "at::from_blob(x, {2}, options);\n", "smp/step.cpp:2: from_blob only"),
    ("smp/step.cpp", "at::empty(sizes, at::TensorOptions().dtype(dtype));\n", "smp/step.cpp:2: TensorOptions only"),
    ("smp/step.cpp", "at::empty(sizes, at::dtype(at::kLong));\n", "smp/step.cpp:2: at::dtype only"),
    ("smp/step.cpp", "at::tensor(sizes, at::kLong);\n", "smp/step.cpp:2: at::tensor only"),
    ("smp/step.cpp", "at::zeros({3});\n", "smp/step.cpp:2: at::zeros only"),
]


class CheckDevice(unittest.TestCase):
    def violations(self, files, exceptions):
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return violations_in(root, exceptions)[0]

    def test_clean_tree_has_no_violation(self):
        self.assertEqual(self.violations(CLEAN, EXCEPTIONS), [])

    def test_each_planted_violation_is_found(self):
        for file, text, expected in PLANTED:
            with self.subTest(expected):
                found = self.violations({**CLEAN, file: CLEAN[file] + text}, EXCEPTIONS)
                self.assertEqual([violation.split(" in runtime/device")[0] for violation in found], [expected])

    def test_an_exception_that_nothing_needs_is_found(self):
        for path in ("runtime/stage/stage.cpp", "runtime/gone.cpp"):
            found = self.violations(CLEAN, {**EXCEPTIONS, path: {"memcpy": "no reason"}})
            self.assertEqual(found, [f"{path}:1: memcpy is an exception of tests/arrows/check_device.py that nothing needs"])


if __name__ == "__main__":
    unittest.main()
