//! Shapes that every service of this crate has.

/// Access to the service within, for a service with a field `inner: S`.
macro_rules! inner_service {
    () => {
        /// The inner service.
        pub fn get_ref(&self) -> &S {
            &self.inner
        }

        /// The inner service.
        pub fn get_mut(&mut self) -> &mut S {
            &mut self.inner
        }

        /// The inner service.
        pub fn into_inner(self) -> S {
            self.inner
        }
    };
}
