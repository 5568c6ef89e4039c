//! The rights of users, and the files of certificates.

use crate::RedisServer;

/// Creates or changes a user with the rules of an ACL line.
pub async fn allow(server: &RedisServer, user: &str, rules: &[&str]) {
    let command: Vec<_> = ["ACL", "SETUSER", user]
        .iter()
        .chain(rules)
        .copied()
        .collect();
    server.command(&command).await;
}

/// The rules of the documented line.
pub fn rules(line: &str) -> Vec<&str> {
    let words: Vec<_> = line.split(' ').collect();
    assert_eq!(
        words[..5],
        ["ACL", "SETUSER", "<user>", "on", "><password>"],
        "{line}"
    );
    words[5..].to_vec()
}

/// A file with a certificate or a key.
pub fn file_of(pem: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a directory for temporary files");
    std::fs::write(&file, pem).expect("a file that can be written");
    file
}
