#include "hibernate/helper.hpp"

int main(int count, char** arguments) { return memsaver::hibernate::run_helper({arguments + 1, arguments + count}); }
