//! Lock policies from a file, as somebody meets them who wants them to fail: texts that are no policies, paths that could be taken for
//! others, requests that come while the file is read again.

mod corpus;
mod file;
mod inheritance;
mod keys;
mod reload;
mod routes;
mod serving;
mod text;
