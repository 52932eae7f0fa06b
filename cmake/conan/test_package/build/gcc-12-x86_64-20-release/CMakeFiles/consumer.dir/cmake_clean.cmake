file(REMOVE_RECURSE
  "CMakeFiles/consumer.dir/work/main/tests/consumers/main.cpp.o"
  "CMakeFiles/consumer.dir/work/main/tests/consumers/main.cpp.o.d"
  "consumer"
  "consumer.pdb"
)

# Per-language clean rules from dependency scanning.
foreach(lang CXX)
  include(CMakeFiles/consumer.dir/cmake_clean_${lang}.cmake OPTIONAL)
endforeach()
